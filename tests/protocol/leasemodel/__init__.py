"""A model of the lease protocol (docs/protocol.md) that a search runs through every order of events it can have.

Read it in this order, and it teaches the protocol:

1. `rules`      what must hold, R1 .. R9, one switch per clause; a fault is one switch thrown
2. `world`      what there is: lives of processes, streams, words, memory, mail, requests
3. `hardware`   what goes on by itself: streams, deaths, drains
4. `producer`, `recycler`, `consumer`, `owner`   what the programs do, one function a step
5. `chance`     what befalls them: kills, stops, lost and doubled mail, changed minds
6. `laws`       what may never happen, whatever the order
7. `scenarios`, `attacks`   small worlds searched completely, and the faults that must be found in them
8. `explore`    the search; `books`: how it drives the ledger that ships; `pressure`: R9, in a model of its own

The decisions of the pool are made by `tensorferry.codecs.pool.ledger.Ledger` itself, not by a copy of it.
"""
