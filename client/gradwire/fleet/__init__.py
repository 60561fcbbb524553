"""A fleet: engines for one server, started on the machines of a Ray cluster; needs ``gradwire[fleet]``.

Ray starts agents (`gradwire engine`), starts them again, and follows the cluster. It carries no data: each agent calls
the server by itself, and the server learns of an engine's death by its socket and lease.
"""
