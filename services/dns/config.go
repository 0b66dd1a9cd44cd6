// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package main

import (
	"net/netip"
	"path/filepath"
	"strconv"
	"time"

	"github.com/sluice-net/sluice/kit/config"
	"github.com/sluice-net/sluice/kit/instance"
	"github.com/sluice-net/sluice/model/shares"
	"github.com/sluice-net/sluice/services/dns/internal/names"
	"github.com/sluice-net/sluice/services/dns/internal/report"
	"github.com/sluice-net/sluice/services/dns/internal/rules"
)

// Config is the configuration of this service.
type Config struct {
	StateDir      string        `config:"stateDir" help:"directory of the learned names, mode 0700"`
	Policy        string        `config:"policy" help:"unix socket of sluice-policy"`
	Identity      string        `config:"identity" help:"unix socket of sluice-identity"`
	Datapath      string        `config:"datapath" help:"unix socket of sluice-datapath"`
	ProxySocket   string        `config:"proxySocket" help:"unix socket of sluice-datapath for proxies"`
	Names         NamesConfig   `config:"names"`
	Shares        shares.Config `config:"shares"`
	Hold          time.Duration `config:"hold" help:"how long an answer waits for sluice-policy, 100ms to 10s"`
	Refusal       string        `config:"refusal" enum:"auto,nxdomain,refused" help:"answer to refused queries"`
	SearchDomains []string      `config:"searchDomains" help:"search domains of resolvers, with the cluster domain"`
	LearnFrom     []string      `config:"learnFrom" help:"prefixes of servers that may teach addresses; empty: all"`
	NeverLearn    []string      `config:"neverLearn" help:"prefixes of addresses that are never learned"`
	Events        string        `config:"events" enum:"full,redacted,off" help:"queries and answers in sluice observe and Hubble; redacted: without names and addresses"`

	refusal               rules.Refusal // set by Validate
	events                report.Mode
	learnFrom, neverLearn []netip.Prefix
}

// NamesConfig bounds the learned names.
type NamesConfig struct {
	Max       int `config:"max" help:"DNS names that are remembered"`
	Addresses int `config:"addresses" help:"addresses that are remembered for all names together"`
}

func defaults(p instance.Paths) Config {
	return Config{
		StateDir: p.ServiceStateDir("dns"), Policy: p.Socket("policy"), Identity: p.Socket("identity"),
		Datapath: p.Socket("datapath"), ProxySocket: filepath.Join(p.ServiceRunDir("datapath"), "proxy.sock"),
		Names:  NamesConfig{Max: 16_384, Addresses: 262_144},
		Shares: shares.Defaults(),
		Hold:   2 * time.Second, Refusal: rules.Auto,
		SearchDomains: []string{"cluster.local"}, Events: "full",
	}
}

// Validate reports invalid settings. Package config calls it.
func (c *Config) Validate() error {
	var p config.Problems
	for key, path := range map[string]string{
		"stateDir": c.StateDir, "policy": c.Policy, "identity": c.Identity, "datapath": c.Datapath,
		"proxySocket": c.ProxySocket,
	} {
		if !filepath.IsAbs(path) {
			p.Addf(key, "%q is not an absolute path", path)
		}
	}
	for key, n := range map[string]int{"names.max": c.Names.Max, "names.addresses": c.Names.Addresses} {
		if n < 1 || n > 1_000_000 {
			p.Addf(key, "%d is not between 1 and 1000000", n)
		}
	}
	if c.Hold < 100*time.Millisecond || c.Hold > 10*time.Second {
		p.Addf("hold", "%s is not between 100ms and 10s", c.Hold)
	}
	var err error
	if c.refusal, err = rules.NewRefusal(c.Refusal, c.SearchDomains); err != nil {
		p.Addf("searchDomains", "%v", err)
	}
	if c.events, err = report.ParseMode(c.Events); err != nil {
		p.Addf("events", "%v", err)
	}
	c.learnFrom = prefixes(&p, "learnFrom", c.LearnFrom)
	c.neverLearn = prefixes(&p, "neverLearn", c.NeverLearn)
	return p.Err()
}

// prefixes parses a list of prefixes and addresses.
func prefixes(p *config.Problems, key string, texts []string) (out []netip.Prefix) {
	for i, text := range texts {
		prefix, err := netip.ParsePrefix(text)
		if err != nil {
			var a netip.Addr
			if a, err = netip.ParseAddr(text); err == nil && a.Zone() == "" {
				prefix = netip.PrefixFrom(a, a.BitLen())
			} else {
				p.Addf(key+"["+strconv.Itoa(i)+"]", "%q is not a prefix, such as 10.96.0.0/16", text)
				continue
			}
		}
		out = append(out, prefix.Masked())
	}
	return out
}

// exclusions returns the addresses that are never learned.
func (c *Config) exclusions() *names.Exclusions {
	return names.NewExclusions(map[names.Reason][]netip.Prefix{names.Configured: c.neverLearn})
}
