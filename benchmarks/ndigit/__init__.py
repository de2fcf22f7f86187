"""Tables 1 and 2 of "Modeling uncertainty with hedged instance embedding" on N-digit MNIST, with LAM beside them."""
