"""The sandbox's other side: a process of its own, of the standard library alone.

It rebuilds one function, then evaluates it as often as it is asked. Each request is a fork, with four generations:

    serve             holds the function, never runs it
      guard           waits as long as an evaluation may take, keeps what it prints, reports, kills
        init          first process of a new PID namespace: whatever the function forks dies with it
          worker      runs the function, under limits, in a temporary folder, without network

A request holds several evaluations, one after the other in the same worker. The first that hangs or crashes ends it:
the report has those before it and its error, and who asked sends the rest again, to a new worker.

Where the kernel refuses namespaces, init is left out, and the worker's process group is killed instead.

Code that a policy wrote runs in yet another process, ``program_main``, which a worker (or anyone) starts through
``program``: see there, and ``grading`` for tests of it.

Frames on stdin and stdout: 4 bytes of length, little-endian, then pickle (in) or JSON (out). What comes out may have
been shaped by the function, so it is never unpickled.

That process has this folder as a package of its own, ``_sandbox``, so that gradwire itself is not imported there; which
is why these files import each other relatively.
"""
