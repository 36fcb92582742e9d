"""The four models of PPO and what each is asked."""
