"""Print recorded trajectories, or write them as a page: ``python scripts/view_rl_trajectory.py FILE [--html PAGE]``.

The same arguments as ``gradwire trajectories view``.
"""

from gradwire.rl.viewer import app

if __name__ == "__main__":
    app()
