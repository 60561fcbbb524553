"""The sandbox's process: a separate process that uses only the standard library.

It rebuilds one function, then evaluates it on request. Each request is a fork, with four generations:

    serve             holds the function, never runs it
      guard           waits as long as an evaluation may take, keeps what it prints, reports, kills
        init          first process of a new PID namespace: whatever the function forks dies with it
          worker      runs the function, under limits, in a temporary folder, without network

A request holds several evaluations, run one after the other in the same worker. The first that hangs or crashes ends
the request: the report has the results before it and its error, and the caller sends the rest to a new worker.

Where the kernel refuses namespaces, init is left out, and the worker's process group is killed instead.

Code written by a policy runs in another process, ``program_main``, which ``program`` starts; ``grading`` tests such
code.

Frames on stdin and stdout: 4 bytes of length, little-endian, then pickle (in) or JSON (out). The function may have
influenced the output, so it is never unpickled.

The process imports this folder as a package named ``_sandbox``, so that gradwire itself is not imported there;
therefore these files use relative imports."""
