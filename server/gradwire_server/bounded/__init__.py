"""Work on what callers send, in processes of bounded memory and time: neither is the front's.

``pool.py`` is what the front calls; ``program.py`` is the loop of the process that it starts. What such a process
answers is given by the module that it runs: :mod:`gradwire_server.tokenizing.process`, for example.

May import: ``access``, ``errors``. Never torch.
"""
