"""Verification: the accepted tokens of a tree, and the bonus token.

A verifier is a pure function of a tree, the target's distributions and keyed noise; it returns an Acceptance.
It has no model, no cache and no global random state. docs/losslessness.md has the rules and the proofs.

    verifier    rule                                            draws it accepts
    coupled     argmax(log p + keyed noise), then a look-up     any: it does not read them
    mss         accept or reject each draw with min(1, p / q)   i.i.d., without replacement, point masses

A *law* is a distribution of the next token. A *draw* is one proposal of one token by one speculator. The
*path* is the accepted nodes, without the root. The *bonus token* is the target's token after the path.
"""
