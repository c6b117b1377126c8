"""Does an engine sample as it says? A few hundred tokens before a replica's first trajectory tell.

questions   what an engine is asked: prompts, settings, noise
bets        how sure chance can be excluded
verdict     the faults in its answers. Pure
interview   asks an engine that has its first weights
"""
