"""Known models, hardware and prices: data files with source and date per fact, and typed readers."""
