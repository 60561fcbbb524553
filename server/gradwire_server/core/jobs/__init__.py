"""Trainings that the server runs by itself: jobs, the processes that run them, and the files that they train on.

A job's progress is in its run's journal and checkpoints already, and its recipe goes on from them exactly. What is left
to keep is a row a job, in the database that everything else is in.

May import: what the core may. The workers are a program of their own (``gradwire_jobs``), which nothing here imports.
"""
