"""The audit: is what a server answers from its cache what it would answer without one?

``plan`` says what is asked, ``scenarios`` makes plans, ``wire`` speaks to a server, ``play`` runs a
plan and reads its answers again cold, ``judge`` decides, ``shrink`` makes what failed small,
``audit`` does all of it in order, and ``page`` and ``summary`` show the result.
"""
