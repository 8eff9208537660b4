"""The cryptography of secure sums: a server learns the sum of many vectors and nothing else about any."""
