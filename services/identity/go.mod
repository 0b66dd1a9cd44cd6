module github.com/sluice-net/sluice/services/identity

go 1.26.0
