"""Verification: which of the tree's tokens the target says itself, and the one it adds.

A verifier is a pure function: a tree, the target's laws and keyed noise in, an Acceptance out. There is
no model, no cache and no global random state in it. docs/losslessness.md has the rules and the proofs.

    verifier    it is                                           takes draws that are
    coupled     argmax(log p + keyed noise), then a look-up     anything: it never reads them
    mss         accept or reject each draw with min(1, p / q)   i.i.d., without replacement, point masses

Words: a *law* is a distribution of the next token; a *draw* is one proposal of one token by one speculator;
the *path* is the accepted nodes from below the root down; the *bonus token* is the one the target adds.
"""
