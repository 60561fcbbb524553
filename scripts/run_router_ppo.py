"""Train a router's policy by PPO on synthetic requests, as the settings file says; it ships with everything off.

    python scripts/run_router_ppo.py --config configs/policy/rllm.yaml --updates 8 --seed 42 \\
        --set rllm.enabled=true --set trainer.enabled=true

The same arguments as ``gradwire router train``: --episode-length, --set NAME=VALUE, --resume, --overwrite.
"""

from gradwire.router.commands import train_main

if __name__ == "__main__":
    train_main()
