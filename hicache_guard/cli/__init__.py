"""The command line: what a person runs. Reports and tables; no policy."""
