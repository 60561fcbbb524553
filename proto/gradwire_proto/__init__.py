"""The wire contract of gradwire: messages, service stubs and the tensor codec."""
