"""Rollout sessions: what agents ask under a session's URL, recorded as a forest of turns.

May import: what the core may. What a door is asked enters as a conversation for the model's chat template, or as token
ids, and leaves as a prompt; its answer is recorded before the door gives its last part away.
"""
