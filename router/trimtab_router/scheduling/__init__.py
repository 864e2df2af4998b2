"""One stage: what waits, where it can go, how long it will take, what leaves. Pure: router and simulator drive it."""
