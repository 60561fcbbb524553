"""Complete trainings, one file each, to run as they are or to copy and change.

``gradwire train NAME CONFIG.yaml`` runs one. A recipe is a dataclass of settings and a coroutine ``train(settings)``;
:mod:`gradwire.recipes.training` has what surrounds the loop: the server, the run, loggers, the report.
"""
