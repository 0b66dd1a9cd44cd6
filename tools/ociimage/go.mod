module github.com/sluice-net/sluice/tools/ociimage

go 1.26.0
