"""Trainings that the server runs by itself: jobs, the processes that run them, and the files that they train on.

Our own tables, not DBOS: a job's progress is in its run's journal and checkpoints already, and its recipe goes on from
them exactly. What is left to keep is a row a job, in the database that everything else is in. DBOS repeats the steps of
a function in one process; a job's steps are another process that may be killed. It would bring a second database with a
backup of its own, threads that poll it, and SQLAlchemy into the process that answers calls.

May import: what the core may. The workers are a program of their own (``gradwire_jobs``), which nothing here imports.
"""
