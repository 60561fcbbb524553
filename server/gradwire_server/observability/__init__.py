"""What the server shows of itself: metrics, traces, logs, and the view of them in a terminal."""
