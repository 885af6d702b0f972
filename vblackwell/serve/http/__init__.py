"""OpenAI's HTTP interface: bodies to requests of the engine, and its events to bodies."""
