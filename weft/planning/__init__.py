"""From a model, a cluster and what is asked for to checked plans: every candidate compared, the best kept."""
