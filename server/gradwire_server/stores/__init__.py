"""Stores of checkpoints, exports and uploads: whole folders of files, behind one interface (:mod:`.store`).

The front and every engine open the same store: the state folder, another folder that they share, or an object store. It
imports the settings and what all folders share; only :mod:`.objects` imports ``obstore``.
"""
