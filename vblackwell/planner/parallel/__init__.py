"""One model on several GPUs, by arithmetic: what each strategy costs in a step."""
