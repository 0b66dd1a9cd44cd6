module github.com/sluice-net/sluice/services/datapath

go 1.26.0
