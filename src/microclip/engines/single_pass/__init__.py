"""The single-pass engine: one forward and one backward over the whole batch, for every b.

The gradient of a weight that multiplies rows is a sum of outer products, one per row: of what went
in and the gradient of what came out. So one ordinary backward pass holds everything: the norm of
each micro-batch's part of the sum and, once the rule has spoken, the weighted sum itself.

`tracker` follows which example owns each row, through every operation: `owners` is the algebra of
owners, `propagation` has a rule for each kind of operation, and `shortcuts` are for what most
models mostly do. `record` keeps the weights' own gradient work out of the backward pass and notes
each use of a parameter instead: what is known of which function is in `layers`, and `anything` does
the rest. `formed` and `uses` are the algebra of uses, with `native` for its largest products;
`groups` says which examples belong together. `allocator` and `budget` are about memory, `verify`
about checks, and `engine` ties all of it together.
"""
