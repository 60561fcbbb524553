"""The feedback service: people's scores in, better policies out, over HTTP and in the browser.

An application on the SDK: it trains through :mod:`gradwire.rlhf` and a gradwire server, and holds no model itself.
"""
