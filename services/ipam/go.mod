module github.com/sluice-net/sluice/services/ipam

go 1.26.0
