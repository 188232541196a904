"""SGLang on several nodes: topologies as data, and the commands, jobs and manifests made of them.

``tables`` reads what is written down (one TOML a shape, one a model), ``topology`` puts a shape, a
model and a release together, ``flags`` asks the release whether it takes the command lines, and
``commands``, ``slurm`` and ``kubernetes`` write them; ``rehearsed`` cuts a topology down to this
machine and ``rehearsal`` runs it. None of these imports SGLang; a process of
its own does (``flag_report``).
"""
