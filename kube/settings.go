// SPDX-License-Identifier: Apache-2.0
// Copyright 2026 The Sluice Authors

package kube

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"

	"github.com/sluice-net/sluice/kit/config"
)

// serviceAccount is where kubelet puts the credentials of a pod.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// Settings say how a service reaches the Kubernetes API. All that use it have
// them as the group "kubernetes".
type Settings struct {
	API        []string `config:"api" help:"https://host:port of each server of the Kubernetes API; not a Service's"`
	Kubeconfig string   `config:"kubeconfig" help:"file with address and credentials, instead of api, token and ca"`
	Token      string   `config:"token" help:"file with the token of a service account, read again as it changes"`
	CA         string   `config:"ca" help:"file with the certificates that the servers' are checked against"`
}

// NodeSettings are Settings of a service that reads the Node of its machine.
type NodeSettings struct {
	Settings `config:",inline"`
	Node     string `config:"node" help:"name of this machine's Node object"`
}

// Defaults are the credentials that kubelet gives to a pod, and no address.
func Defaults() Settings {
	return Settings{Token: filepath.Join(serviceAccount, "token"), CA: filepath.Join(serviceAccount, "ca.crt")}
}

// NodeDefaults are Defaults with the name of the machine.
func NodeDefaults() NodeSettings {
	name, err := os.Hostname()
	if err != nil {
		name = "" // Validate asks for it
	}
	return NodeSettings{Settings: Defaults(), Node: strings.ToLower(name)} // kubelet does so too
}

// Enabled says whether the service is a client of Kubernetes.
func (s *Settings) Enabled() bool { return len(s.API) > 0 || s.Kubeconfig != "" }

// Validate implements the check of kit/config.
func (s *Settings) Validate() error {
	var p config.Problems
	if len(s.API) > 0 && s.Kubeconfig != "" {
		p.Addf("api", "there is kubeconfig %s, too", s.Kubeconfig)
	}
	for i, address := range s.API {
		if err := checkAddress(address); err != nil {
			p.Addf("api", "[%d]: %w", i, err)
		}
	}
	if len(s.API) > 0 && s.Token == "" {
		p.Addf("token", "needed with api")
	}
	if len(s.API) > 0 && s.CA == "" {
		p.Addf("ca", "needed with api")
	}
	return p.Err()
}

// Validate implements the check of kit/config.
func (s *NodeSettings) Validate() error {
	var p config.Problems
	if s.Enabled() && (s.Node == "" || len(s.Node) > 253) {
		p.Addf("node", "%q is not the name of a Node", s.Node)
	}
	return p.Err()
}

// checkAddress says what is wrong with the address of a server.
func checkAddress(address string) error {
	u, err := url.Parse(address)
	switch {
	case err != nil || u.Scheme != "https" || u.Host == "" || u.Hostname() == "":
		return fmt.Errorf("%q is not https://host:port", address)
	case u.User != nil || u.RawQuery != "" || u.Fragment != "" || strings.Trim(u.Path, "/") != "":
		return fmt.Errorf("%q has more than https://host:port", address)
	}
	return nil
}
