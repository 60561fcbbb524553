"""Code shared by front and engine: frames over a socket pair, the page of crash marks, heartbeats. No torch.

May import nothing of the server.
"""
