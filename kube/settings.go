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

// serviceAccount is the directory into which kubelet mounts the credentials of a pod.
const serviceAccount = "/var/run/secrets/kubernetes.io/serviceaccount"

// Settings configures the connection of a service to the Kubernetes API, as the group "kubernetes" of its
// configuration.
type Settings struct {
	API        []string `config:"api" help:"https://host:port of each server of the Kubernetes API; not a Service's"`
	Kubeconfig string   `config:"kubeconfig" help:"file with address and credentials, instead of api, token and ca"`
	Token      string   `config:"token" help:"file with the token of a service account, reread when it changes"`
	CA         string   `config:"ca" help:"file with the CA certificates that the servers' certificates are verified with"`
}

// NodeSettings extends Settings for a service that reads the Node object of its machine.
type NodeSettings struct {
	Settings `config:",inline"`
	Node     string `config:"node" help:"name of this machine's Node object"`
}

// Defaults returns settings with the credentials that kubelet gives to a pod, and without an address.
func Defaults() Settings {
	return Settings{Token: filepath.Join(serviceAccount, "token"), CA: filepath.Join(serviceAccount, "ca.crt")}
}

// NodeDefaults returns Defaults with the machine's host name as the name of the Node.
func NodeDefaults() NodeSettings {
	name, err := os.Hostname()
	if err != nil {
		name = "" // Validate rejects an empty name
	}
	return NodeSettings{Settings: Defaults(), Node: strings.ToLower(name)} // as kubelet does
}

// Enabled reports whether the service uses the Kubernetes API.
func (s *Settings) Enabled() bool { return len(s.API) > 0 || s.Kubeconfig != "" }

// Validate reports invalid settings. Package config calls it.
func (s *Settings) Validate() error {
	var p config.Problems
	if len(s.API) > 0 && s.Kubeconfig != "" {
		p.Addf("api", "cannot be set together with kubeconfig %s", s.Kubeconfig)
	}
	for i, address := range s.API {
		if err := checkAddress(address); err != nil {
			p.Addf("api", "[%d]: %w", i, err)
		}
	}
	if len(s.API) > 0 && s.Token == "" {
		p.Addf("token", "required if api is set")
	}
	if len(s.API) > 0 && s.CA == "" {
		p.Addf("ca", "required if api is set")
	}
	return p.Err()
}

// Validate reports invalid settings. Package config calls it.
func (s *NodeSettings) Validate() error {
	var p config.Problems
	if s.Enabled() && (s.Node == "" || len(s.Node) > 253) {
		p.Addf("node", "%q is not the name of a Node", s.Node)
	}
	return p.Err()
}

// checkAddress returns an error unless address has the form https://host:port.
func checkAddress(address string) error {
	u, err := url.Parse(address)
	switch {
	case err != nil || u.Scheme != "https" || u.Host == "" || u.Hostname() == "":
		return fmt.Errorf("%q is not https://host:port", address)
	case u.User != nil || u.RawQuery != "" || u.Fragment != "" || strings.Trim(u.Path, "/") != "":
		return fmt.Errorf("%q must be https://host:port and nothing more", address)
	}
	return nil
}
