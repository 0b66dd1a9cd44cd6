// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"path/filepath"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
)

// Config is the configuration of this service.
type Config struct {
	Policy      string `config:"policy" help:"unix socket of sluice-policy"`
	Datapath    string `config:"datapath" help:"unix socket of sluice-datapath"`
	ProxySocket string `config:"proxySocket" help:"unix socket of sluice-datapath for sluice-http"`
}

func defaults(p instance.Paths) Config {
	return Config{Policy: p.Socket("policy"), Datapath: p.Socket("datapath"), ProxySocket: p.HTTPProxySocket()}
}

// Validate reports invalid settings. Package config calls it.
func (c *Config) Validate() error {
	var p config.Problems
	for key, path := range map[string]string{"policy": c.Policy, "datapath": c.Datapath, "proxySocket": c.ProxySocket} {
		if !filepath.IsAbs(path) {
			p.Addf(key, "%q is not an absolute path", path)
		}
	}
	return p.Err()
}
