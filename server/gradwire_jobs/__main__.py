"""``python -m gradwire_jobs``: run the job that the first line of stdin names."""

from gradwire_jobs.worker import main

main()
