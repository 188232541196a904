"""A topology as a Slurm batch job: the same scripts, started by srun on the nodes of the job.

One task is one node. The job needs Slurm 20.11 or later (``--overlap``) and a folder that all nodes
see; it asks for nodes and GPUs, and leaves partition, account and time to the command line.
"""

from __future__ import annotations

from hicache_guard.nodes import commands
from hicache_guard.nodes.topology import Topology

_HEADER = """\
#!/usr/bin/env bash
#SBATCH --job-name={name}
#SBATCH --nodes={nodes}
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node={gpus}
#SBATCH --exclusive
#SBATCH --output=%x-%j.out
# {name}, {model} on SGLang {release}, guard {mode}, as a Slurm job."""

_SRUN = """\
mapfile -t hosts < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if ((${{#hosts[@]}} != {count})); then
    say "this job has ${{#hosts[@]}} nodes and needs {count}"
    exit 2
fi
{assigned}
export {variables}

# ADDRESS SCRIPT: runs a script of this folder on a node.
on() {{
    srun --overlap --nodes=1 --ntasks=1 --nodelist="$1" --export=ALL --kill-on-bad-exit=1 \\
        bash "$here/$2"
}}
"""


def files(topology: Topology) -> dict[str, str]:
    """Names and contents: ``job.sbatch`` and what it starts."""
    nodes = topology.nodes()
    return {
        **commands.shared(topology),
        "hosts.env": "# A Slurm job sets the addresses itself.\n# shellcheck shell=bash\n",
        "job.sbatch": commands.run_script(
            topology,
            header=_HEADER.format(
                name=topology.name,
                nodes=len(nodes),
                gpus=topology.shape.gpus,
                model=topology.model.name,
                release=topology.release,
                mode=topology.guard.value,
            ),
            usage="sbatch job.sbatch",
            # Slurm runs a copy of the job from elsewhere
            here="here=${SLURM_SUBMIT_DIR:?submit this in its folder, with sbatch}",
            launcher=_SRUN.format(
                count=len(nodes),
                assigned="\n".join(
                    f"{node.variable}=${{hosts[{place}]}}" for place, node in enumerate(nodes)
                ),
                variables=" ".join(node.variable for node in nodes),
            ),
        ),
    }
