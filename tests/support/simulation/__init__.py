"""Client, door, core and journal in one process, on simulated time, network and disk: a seed decides everything.

``loop`` is the event loop and the processes on it, ``disk`` the journal's disk, ``network`` the client's channel,
``world`` puts them together and breaks them, ``checker`` says whether what clients saw is what a sequential server
would have shown them.
"""
