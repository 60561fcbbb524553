"""The process that runs a job: a recipe on the SDK, over the server's own door, with the rights of the job's owner.

Files: ``worker`` runs the recipe, ``reporting`` tells the server what happens, ``results`` makes the table of a
training's metrics, ``check`` reads an uploaded file line by line in a process of bounded memory.
"""
