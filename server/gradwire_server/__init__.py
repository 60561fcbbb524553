"""The gradwire server: a front that journals, schedules and answers, and an engine process that computes.

``server.py`` puts the front together. The folders, from the outside in: ``cli``, ``doors``, ``core``, ``scheduling``,
``journal``, ``access``, ``engine_client``, ``observability``, ``engine_link``. ``engine`` is the other process, and the
only place with torch. Imports run in this order and never back.
"""
