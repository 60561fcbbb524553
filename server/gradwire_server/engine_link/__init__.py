"""What front and engine share: frames over a socket pair, the page of crash marks, vital signs. No torch.

May import nothing of the server.
"""
