"""Between a call and the server: requests, the queue of a run, its link, and the channel."""
