"""The gradwire server: a front process that accepts, journals and schedules operations, and an engine that computes.

``server.py`` assembles the front. Its folders, from the outside in: ``cli``, ``doors``, ``core``, ``scheduling``,
``journal``, ``access``, ``engine_client``, ``observability``, ``engine_link``. ``engine`` is the other process and the
only folder that uses torch. A folder imports only from those after it in this list.
"""
