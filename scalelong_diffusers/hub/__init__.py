"""Share models, pipelines and adapters on the Hub."""
