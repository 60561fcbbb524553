"""The gRPC door: thin services over `runs`, `scheduler` and `journal`. Nothing here imports torch."""
