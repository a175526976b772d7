"""Run many trainings, keep their results and draw them. Used by `scalelong paper` and by the benchmarks."""
