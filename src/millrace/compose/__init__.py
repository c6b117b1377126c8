"""What puts a run together: its workers, its hosts, its sinks, and requests while it runs."""
