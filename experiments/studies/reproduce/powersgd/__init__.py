"""The tables of the PowerSGD paper (Vogels et al., NeurIPS 2019), and what follows from its choices."""
