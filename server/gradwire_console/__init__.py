"""The console: a web page that shows and steers the trainings of a server, in a process of its own over the SDK.

May import: gradwire (the client), gradwire_shell, gradwire_http. Never torch, never the server.
"""
