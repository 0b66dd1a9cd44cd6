module github.com/sluice-net/sluice/services/policy

go 1.26.0
