"""Transport of batches to model servers over HTTP: connections, health, batches and streams."""
