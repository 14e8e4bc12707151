"""Everything of XLA: strategies, what a machine lacks, compilations."""
