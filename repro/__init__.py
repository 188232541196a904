"""Programs that recreate reported faults on real SGLang code, with the guard and without."""
